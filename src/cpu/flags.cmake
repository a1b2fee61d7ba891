# One binary for every x86-64: these files are compiled for wider instruction sets and reached only
# where the processor has them. They keep IEEE semantics; the two -fno- options drop errno and trap
# handling, which nothing here reads and which block vectorisation.
# Under sanitizers, -O3 is most of the compile time of all files together, and below -O1 these files
# are most of the tests' time.
set(INGOT_HOT_FLAGS -O3)
if(INGOT_SANITIZE)
  set(INGOT_HOT_FLAGS -O1)
endif()
set(INGOT_PRIMITIVE_FLAGS ${INGOT_HOT_FLAGS} -fno-math-errno -fno-trapping-math -ffp-contract=off)
set(INGOT_PRODUCT_FLAGS ${INGOT_HOT_FLAGS} -fno-math-errno -fno-trapping-math -ffp-contract=fast)
set(INGOT_LEVEL_FLAGS_baseline "")
set(INGOT_LEVEL_FLAGS_avx2 "")
set(INGOT_LEVEL_FLAGS_avx512 "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(INGOT_LEVEL_FLAGS_avx2 -mavx2 -mfma -mf16c -mprefer-vector-width=256)
  set(INGOT_LEVEL_FLAGS_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl
    -mprefer-vector-width=512)
endif()
foreach(level baseline avx2 avx512)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/cpu/primitives_${level}.cpp
    PROPERTIES COMPILE_OPTIONS "${INGOT_PRIMITIVE_FLAGS};${INGOT_LEVEL_FLAGS_${level}}")
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/cpu/product/kernels_${level}.cpp
    PROPERTIES COMPILE_OPTIONS "${INGOT_PRODUCT_FLAGS};${INGOT_LEVEL_FLAGS_${level}}")
endforeach()

# The product on AMX tiles: its inner parts for processors that have them, and twice with the tiles
# emulated. g++ 12 takes values that its own header leaves undefined on purpose for mistakes.
set(INGOT_AMX_FLAGS ${INGOT_HOT_FLAGS} -fno-math-errno -fno-trapping-math -ffp-contract=off)
set(INGOT_AMX_VECTOR_FLAGS "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(INGOT_AMX_VECTOR_FLAGS ${INGOT_LEVEL_FLAGS_avx512} -mavx512bf16
    -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
foreach(engine instructions emulated_avx512)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/cpu/product/amx/engine_${engine}.cpp
    PROPERTIES COMPILE_OPTIONS "${INGOT_AMX_FLAGS};${INGOT_AMX_VECTOR_FLAGS}")
endforeach()
set_source_files_properties(${PROJECT_SOURCE_DIR}/src/cpu/product/amx/engine_emulated.cpp
  PROPERTIES COMPILE_OPTIONS "${INGOT_AMX_FLAGS}")
