# Compiler, linker and cache settings for every target.
# In: MTRAINING_CUDA, MTRAINING_SANITIZE.  Out: MT_CUDA (bool), MT_WARNINGS.  Next: MtPackages.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# -g1: line numbers for stack traces at two thirds of -g's compile time. Asserts (MT_ASSERT) do not depend on NDEBUG.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")
set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O2 -lineinfo -DNDEBUG")
# One flag for libraries and executables alike (CMake would say -fPIC and -fPIE), so that all can share one precompiled header.
set(CMAKE_POSITION_INDEPENDENT_CODE OFF)
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fPIC> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fPIC>)
set(MT_WARNINGS $<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra> $<$<COMPILE_LANGUAGE:CXX>:-Werror>)

find_program(MT_CCACHE ccache)
if(MT_CCACHE)
  # The sloppiness is what lets ccache hit through the precompiled header; -fpch-preprocess (MtPackages) is its other half.
  set(launcher ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime CCACHE_NOHASHDIR=1
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} ${MT_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
endif()

find_program(MT_LLD ld.lld)
if(MT_LLD)
  add_link_options(-fuse-ld=lld)
endif()

if(MTRAINING_SANITIZE)
  if(NOT MTRAINING_SANITIZE MATCHES "^(address|thread)$")
    message(FATAL_ERROR "MTRAINING_SANITIZE: expected address or thread, got ${MTRAINING_SANITIZE}")
  endif()
  set(kinds ${MTRAINING_SANITIZE})
  if(MTRAINING_SANITIZE STREQUAL "address")
    # vptr would need the type information that torch's libraries do not export.
    set(kinds address,undefined)
    add_compile_options(-fno-sanitize=vptr)
  endif()
  add_compile_options(-fsanitize=${kinds} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${kinds})
endif()

set(MT_CUDA OFF)
if(MTRAINING_TORCH AND NOT MTRAINING_SANITIZE AND NOT MTRAINING_CUDA STREQUAL "OFF")
  find_program(MT_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDACXX} /usr/local/cuda/bin)
  if(MT_NVCC)
    set(CMAKE_CUDA_COMPILER ${MT_NVCC})
    enable_language(CUDA)
    set(MT_CUDA ON)
  elseif(NOT MTRAINING_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "MTRAINING_CUDA=ON, but nvcc is neither on PATH nor in /usr/local/cuda/bin: install the CUDA 13.0 toolkit "
                        "or configure with -DMTRAINING_CUDA=OFF (preset cpu)")
  endif()
endif()
message(STATUS "mtraining: torch ${MTRAINING_TORCH}, CUDA ${MT_CUDA}, ccache ${MT_CCACHE}, lld ${MT_LLD}")
