# libingot_blas.so stands before cuBLAS in any process (LD_PRELOAD), so it brings in nothing but the C
# library: libingot.so, which lies beside it, is opened at the first product.

file(GLOB INGOT_BLAS_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/blas/*.cpp)

# What needs no cuBLAS and no GPU; the unit tests link it too.
set(INGOT_BLAS_PURE graph policy product statistics)
list(TRANSFORM INGOT_BLAS_PURE PREPEND ${PROJECT_SOURCE_DIR}/src/blas/)
list(TRANSFORM INGOT_BLAS_PURE APPEND .cpp)
add_library(ingot_blas_pure OBJECT ${INGOT_BLAS_PURE})
target_include_directories(ingot_blas_pure PUBLIC
  ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
ingot_compiler_options(ingot_blas_pure)

# Not under sanitizers: their runtime must be the first library of a process, and so must this one.
if(NOT INGOT_SANITIZE)
  list(REMOVE_ITEM INGOT_BLAS_SOURCES ${INGOT_BLAS_PURE})
  add_library(ingot_blas SHARED ${INGOT_BLAS_SOURCES} $<TARGET_OBJECTS:ingot_blas_pure>)
  target_include_directories(ingot_blas PRIVATE
    ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(ingot_blas PRIVATE ${CMAKE_DL_LIBS})
  ingot_compiler_options(ingot_blas)
  set(exports ${PROJECT_SOURCE_DIR}/cmake/blas_exports.map)
  target_link_options(ingot_blas PRIVATE -static-libstdc++ -static-libgcc
    -Wl,--version-script=${exports} -Wl,--no-undefined -Wl,--gc-sections
    # Its own functions and no others of their names, wherever it comes in the order of symbols; and it
    # stays, for other libraries' tables point to it.
    -Wl,-Bsymbolic -Wl,-z,nodelete)
  set_property(TARGET ingot_blas APPEND PROPERTY LINK_DEPENDS ${exports})
endif()
