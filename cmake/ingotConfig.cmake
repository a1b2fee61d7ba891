include("${CMAKE_CURRENT_LIST_DIR}/ingotTargets.cmake")
