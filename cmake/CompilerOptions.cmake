# Warnings, sanitizers and the check for header-only dependencies.

include(CheckIncludeFileCXX)

# Fails at configure time, naming the Debian package, when a header is not found.
function(ingot_require_header header package)
  string(MAKE_C_IDENTIFIER "INGOT_HAVE_${header}" have)
  set(CMAKE_REQUIRED_DEFINITIONS -DFMT_HEADER_ONLY -DSPDLOG_FMT_EXTERNAL_HO -DXXH_INLINE_ALL)
  set(CMAKE_REQUIRED_QUIET ON)
  if(NOT ${have})
    unset(${have} CACHE)  # ask again after the package was installed
  endif()
  check_include_file_cxx(${header} ${have})
  if(NOT ${have})
    message(FATAL_ERROR "<${header}> not found. Install it (Debian: apt-get install ${package}), "
      "or run tools/setup.")
  endif()
endfunction()

set(INGOT_SANITIZE_FLAGS "")
if(INGOT_SANITIZE)
  set(INGOT_SANITIZE_FLAGS -fsanitize=${INGOT_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer)
endif()

function(ingot_compiler_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wconversion -fno-fast-math
    $<$<BOOL:${INGOT_WARNINGS_AS_ERRORS}>:-Werror> ${INGOT_SANITIZE_FLAGS})
  target_link_options(${target} PRIVATE ${INGOT_SANITIZE_FLAGS})
endfunction()

# The library enters processes that carry an older C++ runtime (conda's, for one), so it brings
# its own and hides it; the sanitizers' runtime needs the shared one.
function(ingot_linker_options target)
  target_link_options(${target} PRIVATE ${INGOT_SANITIZE_FLAGS})
  if(INGOT_SANITIZE)
    return()
  endif()
  set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc
    -Wl,--version-script=${exports} -Wl,--no-undefined -Wl,--gc-sections)
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${exports})
endfunction()
