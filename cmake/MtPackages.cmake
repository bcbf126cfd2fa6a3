# Third-party libraries as imported targets.
# Out: mt_torch (libtorch for the CPU, c10d with Gloo), mt_torch_cuda (adds CUDA and NCCL; equals mt_torch without CUDA), mt_gtest.
#
# find_package(Torch) is not used: it adds its own -gencode flags, turns CMAKE_CUDA_ARCHITECTURES off, and stops with an error where the
# CUDA wheel meets a machine without nvcc. The libraries are named instead.

find_package(Threads REQUIRED)

# Header-only libraries: found once here so that what is missing is said in one sentence; they need no target.
foreach(entry nlohmann/json.hpp:nlohmann-json3-dev CLI/CLI.hpp:libcli11-dev toml++/toml.h:libtomlplusplus-dev xxhash.h:libxxhash-dev
              gtest/gtest.h:libgtest-dev benchmark/benchmark.h:libbenchmark-dev gloo/config.h:libgloo-dev)
  if(entry MATCHES "^gloo" AND NOT MTRAINING_TORCH)
    continue()
  endif()
  string(REPLACE ":" ";" entry ${entry})
  list(GET entry 0 header)
  list(GET entry 1 package)
  string(MAKE_C_IDENTIFIER ${package} id)
  find_path(MT_HEADER_${id} ${header})
  mark_as_advanced(MT_HEADER_${id})
  if(NOT MT_HEADER_${id})
    message(FATAL_ERROR "${header} is missing: apt-get install ${package} (./dev build does this by itself when run as root)")
  endif()
endforeach()
find_package(GTest CONFIG REQUIRED)
# By file: the package's targets define GTEST_HAS_PTHREAD, which would differ from the shared precompiled header's.
add_library(mt_gtest INTERFACE)
target_link_libraries(mt_gtest INTERFACE $<TARGET_FILE:GTest::gtest_main> $<TARGET_FILE:GTest::gtest> Threads::Threads)

if(NOT MTRAINING_TORCH)
  return()
endif()

# ---- libtorch from the wheel in .venv (or from MTRAINING_TORCH_DIR) ----
if(NOT MTRAINING_TORCH_DIR)
  find_program(MT_PYTHON python3 PATHS ${CMAKE_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)
  find_program(MT_PYTHON python3)
  execute_process(
    COMMAND ${MT_PYTHON} -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT torch_dir)
    message(FATAL_ERROR "${MT_PYTHON} has no torch: run ./dev build (it makes .venv from requirements.txt), or pass "
                        "-DMTRAINING_TORCH_DIR=<site-packages>/torch, or build the core alone with --preset core")
  endif()
  set(MTRAINING_TORCH_DIR ${torch_dir} CACHE PATH "The folder of the torch wheel")
endif()
set(torch_lib ${MTRAINING_TORCH_DIR}/lib)
cmake_path(GET MTRAINING_TORCH_DIR PARENT_PATH site_packages)

add_library(mt_torch_libs INTERFACE)
foreach(name c10 torch_cpu)
  add_library(mt_${name} SHARED IMPORTED)
  set_target_properties(mt_${name} PROPERTIES IMPORTED_LOCATION ${torch_lib}/lib${name}.so)
  target_link_libraries(mt_torch_libs INTERFACE mt_${name})
endforeach()
target_include_directories(mt_torch_libs SYSTEM INTERFACE ${MTRAINING_TORCH_DIR}/include
                                                          ${MTRAINING_TORCH_DIR}/include/torch/csrc/api/include)
target_compile_definitions(mt_torch_libs INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
# The CUDA wheel's libtorch_cpu refers to symbols of libraries that torch itself loads; they are not ours to resolve.
target_link_options(mt_torch_libs INTERFACE -Wl,--allow-shlib-undefined -Wl,-rpath,${torch_lib})
target_link_libraries(mt_torch_libs INTERFACE Threads::Threads)

add_library(mt_torch_cuda_libs INTERFACE)
target_link_libraries(mt_torch_cuda_libs INTERFACE mt_torch_libs)
if(MT_CUDA)
  set(cu13 ${site_packages}/nvidia/cu13)
  # As one link item: the linker would drop libtorch_cuda otherwise, for nothing refers to it by name; it registers itself when loaded.
  target_link_libraries(mt_torch_cuda_libs INTERFACE ${torch_lib}/libc10_cuda.so
    "-Wl,--push-state,--no-as-needed,${torch_lib}/libtorch_cuda.so,--pop-state")
  target_compile_definitions(mt_torch_cuda_libs INTERFACE USE_C10D_NCCL)
  target_include_directories(mt_torch_cuda_libs SYSTEM INTERFACE ${site_packages}/nvidia/nccl/include
                                                                 ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # cudart from the wheel, the one that torch itself runs with.
  add_library(mt_cudart INTERFACE)
  file(GLOB cudart_so ${cu13}/lib/libcudart.so.*)  # its name carries the version; this lists a library, not sources
  list(GET cudart_so 0 cudart_so)
  target_link_libraries(mt_cudart INTERFACE ${cudart_so})
  target_link_options(mt_cudart INTERFACE -Wl,-rpath,${cu13}/lib)
  target_include_directories(mt_cudart SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(mt_torch_cuda_libs INTERFACE mt_cudart)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  # CuTe and CUTLASS headers (the wheel nvidia-cutlass): DEPS mt_cutlass.
  set(cutlass ${site_packages}/cutlass_library/source/include)
  if(NOT EXISTS ${cutlass}/cute/tensor.hpp)
    message(FATAL_ERROR "CUTLASS headers are missing in ${cutlass}: .venv/bin/pip install --no-deps nvidia-cutlass==4.2.0.0 (./dev build does this by itself)")
  endif()
  add_library(mt_cutlass INTERFACE)
  target_include_directories(mt_cutlass SYSTEM INTERFACE ${cutlass})
  target_compile_options(mt_cutlass INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
endif()

# ---- the precompiled header that every torch target shares: 24 s once instead of 7 to 13 s a unit ----
file(WRITE ${CMAKE_BINARY_DIR}/mt_torch_pch.cc.in "// Only carries the precompiled header.\n")
configure_file(${CMAKE_BINARY_DIR}/mt_torch_pch.cc.in ${CMAKE_BINARY_DIR}/mt_torch_pch.cc COPYONLY)
add_library(mt_torch_pch OBJECT ${CMAKE_BINARY_DIR}/mt_torch_pch.cc)
target_link_libraries(mt_torch_pch PRIVATE mt_torch_libs)
target_compile_options(mt_torch_pch PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
target_precompile_headers(mt_torch_pch PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:<ATen/ATen.h$<ANGLE-R>> $<$<COMPILE_LANGUAGE:CXX>:<torch/csrc/autograd/custom_function.h$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<gtest/gtest.h$<ANGLE-R>>)
