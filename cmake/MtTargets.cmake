# The functions that a folder's CMakeLists.txt uses. Sources are listed by name; nothing globs.
#
#   mt_library(layout SOURCES block_striped.cc DEPS base)                 -> static library mt_layout
#   mt_library(comm_c10d SOURCES c10d_transport.cc DEPS comm TORCH)       -> static library mt_comm_c10d, needs torch
#   mt_test(layout_test SOURCES block_striped_test.cc DEPS layout testing LABELS unit)   -> binary + one ctest test of this name
#   mt_shared_library(mtraining_ops SOURCES ops.cc DEPS torch_ops TORCH)  -> lib/libmtraining_ops.so, for Python to load
#   mt_executable(mtraining SOURCES main.cc DEPS train TORCH)             -> bin/mtraining
#
# DEPS: names of other mt_library()s, or any other CMake target or library. Give only what is included directly.
# TORCH: links libtorch and uses the shared precompiled header; the target does not exist with MTRAINING_TORCH=OFF.
# TORCH_CUDA: TORCH, and CUDA and NCCL where the build has them (the code asks #ifdef USE_C10D_NCCL). Only what needs it: loading
#             libtorch_cuda costs a test a second.
# CUDA_SOURCES: .cu files, compiled only where the build has CUDA (the code asks #ifdef MT_WITH_CUDA).
# LABELS: one of unit dist cuda multi_gpu slow (default unit).  TIMEOUT: seconds (default 120).  PROCESSORS: cores the test keeps busy.
# A library with no SOURCES yet is an interface library; a test with no SOURCES yet does not exist.

set(MT_FOLDERS
    base layout topology kernels      # 0, 1
    ring index trace comm             # 2
    sim pattern                       # 3
    attention                         # 4
    testing                           # included by tests and benches only
    model torch_ops optim data        # 5
    checkpoint                        # 6
    train eval)                       # 7

function(mt_resolve_deps_ out)
  set(result)
  foreach(dep IN LISTS ARGN)
    if(TARGET ${dep} OR dep MATCHES "::|^-|^/")
      list(APPEND result ${dep})
    else()
      list(APPEND result mt_${dep})
    endif()
  endforeach()
  set(${out} ${result} PARENT_SCOPE)
endfunction()

# Warnings, torch and the precompiled header (a source that gains nothing from it: SKIP_PRECOMPILE_HEADERS ON).
function(mt_set_up_ target torch torch_cuda)
  target_compile_options(${target} PRIVATE ${MT_WARNINGS})
  get_target_property(type ${target} TYPE)
  set(scope PUBLIC)
  if(type STREQUAL "EXECUTABLE")
    set(scope PRIVATE)
  endif()
  if(torch_cuda)
    target_link_libraries(${target} ${scope} mt_torch_cuda_libs)
  elseif(torch)
    target_link_libraries(${target} ${scope} mt_torch_libs)
  endif()
  if(torch OR torch_cuda)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
    target_precompile_headers(${target} REUSE_FROM mt_torch_pch)
  endif()
  if(MT_CUDA)
    target_compile_definitions(${target} PRIVATE MT_WITH_CUDA)
  endif()
endfunction()

function(mt_library name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "TORCH;TORCH_CUDA" "" "SOURCES;CUDA_SOURCES;DEPS")
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "mt_library(${name}): unknown argument ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if((ARG_TORCH OR ARG_TORCH_CUDA) AND NOT MTRAINING_TORCH)
    return()
  endif()
  set(target mt_${name})
  mt_resolve_deps_(deps ${ARG_DEPS})
  if(MT_CUDA)
    list(APPEND ARG_SOURCES ${ARG_CUDA_SOURCES})
  endif()
  if(NOT ARG_SOURCES)
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE ${CMAKE_SOURCE_DIR})
    target_link_libraries(${target} INTERFACE ${deps})
    if(ARG_TORCH_CUDA)
      target_link_libraries(${target} INTERFACE mt_torch_cuda_libs)
    elseif(ARG_TORCH)
      target_link_libraries(${target} INTERFACE mt_torch_libs)
    endif()
    return()
  endif()
  add_library(${target} STATIC ${ARG_SOURCES})
  target_include_directories(${target} PUBLIC ${CMAKE_SOURCE_DIR})
  target_link_libraries(${target} PUBLIC ${deps})
  mt_set_up_(${target} "${ARG_TORCH}" "${ARG_TORCH_CUDA}")
  if(MT_CUDA AND ARG_CUDA_SOURCES)
    target_link_libraries(${target} PUBLIC mt_cudart)
  endif()
endfunction()

function(mt_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "TORCH;TORCH_CUDA" "TIMEOUT;PROCESSORS" "SOURCES;DEPS;LABELS")
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "mt_test(${name}): unknown argument ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT ARG_SOURCES OR ((ARG_TORCH OR ARG_TORCH_CUDA) AND NOT MTRAINING_TORCH))
    return()
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  foreach(label IN LISTS ARG_LABELS)
    if(NOT label MATCHES "^(unit|dist|cuda|multi_gpu|slow)$")
      message(FATAL_ERROR "mt_test(${name}): label ${label} is not one of unit dist cuda multi_gpu slow")
    endif()
  endforeach()
  if("cuda" IN_LIST ARG_LABELS OR "multi_gpu" IN_LIST ARG_LABELS)
    if(NOT MT_CUDA)
      return()
    endif()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(NOT ARG_PROCESSORS)
    set(ARG_PROCESSORS 1)
  endif()
  mt_resolve_deps_(deps ${ARG_DEPS})
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${deps} mt_gtest)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests LINKER_LANGUAGE CXX)
  mt_set_up_(${name} "${ARG_TORCH}" "${ARG_TORCH_CUDA}")
  # One ctest test a binary: starting a torch process costs more than most cases. ./dev test counts the cases from the JSON files.
  add_test(NAME ${name} COMMAND ${name} --gtest_output=json:${CMAKE_BINARY_DIR}/test-results/${name}.json
           WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${ARG_PROCESSORS}
    ENVIRONMENT "MTRAINING_BINARY_DIR=${CMAKE_BINARY_DIR};LSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/cmake/lsan.supp;UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1;TSAN_OPTIONS=ignore_noninstrumented_modules=1")
endfunction()

# SOURCES are compiled into the library itself, so that what they register (operators) is not dropped by the linker.
# Not with a sanitizer: Python would have to be started under its runtime.
function(mt_shared_library name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "TORCH;TORCH_CUDA" "" "SOURCES;DEPS")
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "mt_shared_library(${name}): unknown argument ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT ARG_SOURCES OR NOT MTRAINING_PYTHON OR MTRAINING_SANITIZE OR ((ARG_TORCH OR ARG_TORCH_CUDA) AND NOT MTRAINING_TORCH))
    return()
  endif()
  mt_resolve_deps_(deps ${ARG_DEPS})
  add_library(${name} SHARED ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${deps} Threads::Threads)
  # Its own copies of the static libraries stay its own when another library of the process has them too.
  target_link_options(${name} PRIVATE -Wl,-Bsymbolic -Wl,--exclude-libs,ALL)
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib LINKER_LANGUAGE CXX)
  mt_set_up_(${name} "${ARG_TORCH}" "${ARG_TORCH_CUDA}")
endfunction()

function(mt_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "TORCH;TORCH_CUDA" "" "SOURCES;DEPS")
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "mt_executable(${name}): unknown argument ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT ARG_SOURCES OR ((ARG_TORCH OR ARG_TORCH_CUDA) AND NOT MTRAINING_TORCH))
    return()
  endif()
  mt_resolve_deps_(deps ${ARG_DEPS})
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${deps} Threads::Threads)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin LINKER_LANGUAGE CXX)
  mt_set_up_(${name} "${ARG_TORCH}" "${ARG_TORCH_CUDA}")
endfunction()
