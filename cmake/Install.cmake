# Two layouts of the same files: the usual one under a prefix (component "ingot", with
# find_package(ingot)), and the one inside the Python package (component "python", for the wheel).

include(CMakePackageConfigHelpers)

set(INGOT_CONFIG_DIR ${PROJECT_BINARY_DIR}/cmake)
write_basic_package_version_file(${INGOT_CONFIG_DIR}/ingotConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)

function(ingot_install component prefix lib_dir include_dir)
  install(TARGETS ingot EXPORT ingot_${component}_targets
    LIBRARY DESTINATION ${prefix}${lib_dir} COMPONENT ${component} ${ARGN}
    INCLUDES DESTINATION ${prefix}${include_dir})
  if(TARGET ingot_blas)
    install(TARGETS ingot_blas LIBRARY DESTINATION ${prefix}${lib_dir}
      COMPONENT ${component} ${ARGN})
  endif()
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${prefix}${include_dir}
    COMPONENT ${component} ${ARGN} FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
  install(EXPORT ingot_${component}_targets NAMESPACE ingot:: FILE ingotTargets.cmake
    DESTINATION ${prefix}${lib_dir}/cmake/ingot COMPONENT ${component} ${ARGN})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/ingotConfig.cmake
    ${INGOT_CONFIG_DIR}/ingotConfigVersion.cmake
    DESTINATION ${prefix}${lib_dir}/cmake/ingot COMPONENT ${component} ${ARGN})
endfunction()

ingot_install(ingot "" ${CMAKE_INSTALL_LIBDIR} ${CMAKE_INSTALL_INCLUDEDIR})
ingot_install(python "ingot/" lib include EXCLUDE_FROM_ALL)

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/NOTICE
  DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT ingot)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/licenses DESTINATION ${CMAKE_INSTALL_DOCDIR}
  COMPONENT ingot)
