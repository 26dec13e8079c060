# Asks Pythons for the flags of their TensorFlow. Importing TensorFlow takes
# seconds, so each answer is cached until another TensorFlow is found there.
#
#   TFSWITCH_TENSORFLOW_MINORS      such as 2.21, the newest one first
#   tensorflow_framework_2.21       headers, compile flags and the library that
#                                   ops link, for each of them
#   tensorflow_framework            the same of the newest of them
#   tensorflow_cc                   libtensorflow_cc.so.2, for C++ programs
#   tensorflow_c                    its C API alone, and no C++ header
#   TFSWITCH_TENSORFLOW_2.21_VERSION, _INCLUDE, _LIB, ...
#
# Set Python_EXECUTABLE to choose the Python; without it the virtual environment
# `.venv` of the checkout is taken if there is one. With a list of Pythons in
# TFSWITCH_TENSORFLOW_PYTHONS there are ops for the TensorFlow of each.

if(NOT Python_EXECUTABLE AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
if(NOT TFSWITCH_TENSORFLOW_PYTHONS)
  set(TFSWITCH_TENSORFLOW_PYTHONS "${Python_EXECUTABLE}")
endif()

# The extra of pyproject.toml has the range of versions.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml" _extra
     REGEX "^tensorflow = ")
string(REGEX MATCH "tensorflow(>=([0-9.]+),<([0-9.]+))" _extra "${_extra}")
set(_range "${CMAKE_MATCH_1}")
set(_begin "${CMAKE_MATCH_2}")
set(_end "${CMAKE_MATCH_3}")

function(tfswitch_find_tensorflow python)
  # Cheap: finds the package without importing it. While pip builds a package, it
  # hides the environment that it installs into, by means of PYTHONPATH. With -E
  # the interpreter does not read that variable, and sees the environment.
  foreach(option "" -E)
    set(command "${python}" ${option})
    execute_process(
      COMMAND
        ${command} -c "import importlib.util, os, sys
spec = importlib.util.find_spec('tensorflow') or sys.exit(1)
path = os.path.join(os.path.dirname(spec.origin), 'libtensorflow_framework.so.2')
print(path, os.stat(path).st_mtime_ns)"
      OUTPUT_VARIABLE key
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_VARIABLE error
      RESULT_VARIABLE result)
    if(result EQUAL 0)
      break()
    endif()
  endforeach()
  if(NOT result EQUAL 0)
    message(
      FATAL_ERROR
        "${python} has no TensorFlow. Install tensorflow${_range} or "
        "tensorflow-cpu for it, choose another Python with "
        "-DPython_EXECUTABLE=..., or build without the ops with "
        "-DTFSWITCH_BUILD_PYTHON=OFF.\n${error}")
  endif()

  string(MAKE_C_IDENTIFIER "${python}" name)
  set(cached TFSWITCH_TENSORFLOW_OF_${name})
  if(NOT "${key}" STREQUAL "${${cached}_KEY}")
    # Marked, because TensorFlow may print to stdout while it is imported.
    execute_process(
      COMMAND
        "${CMAKE_COMMAND}" -E env CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3
        ${command} -c "import os
import tensorflow as tf
print('<<' + '|'.join([
    tf.__version__,
    tf.sysconfig.get_include(),
    tf.sysconfig.get_lib(),
    ';'.join(f for f in tf.sysconfig.get_compile_flags()
             if not f.startswith(('-I', '--std'))),
    ';'.join(tf.sysconfig.get_link_flags()),
]) + '>>')"
      OUTPUT_VARIABLE flags
      ERROR_VARIABLE error
      RESULT_VARIABLE result)
    if(NOT result EQUAL 0 OR NOT flags MATCHES
                             "<<([^|]*\\|[^|]*\\|[^|]*\\|[^|]*\\|[^|]*)>>")
      message(FATAL_ERROR "TensorFlow of ${python} cannot be imported:\n${error}")
    endif()
    set(${cached}
        "${CMAKE_MATCH_1}"
        CACHE INTERNAL "TensorFlow of ${python}")
    set(${cached}_KEY
        "${key}"
        CACHE INTERNAL "Which TensorFlow the flags are of")
  endif()
  string(REGEX MATCH "(.*)\\|(.*)\\|(.*)\\|(.*)\\|(.*)" _ "${${cached}}")
  set(version "${CMAKE_MATCH_1}")
  set(include "${CMAKE_MATCH_2}")
  set(lib "${CMAKE_MATCH_3}")
  set(compile_flags "${CMAKE_MATCH_4}")
  set(link_flags "${CMAKE_MATCH_5}")
  if(version VERSION_LESS _begin OR version VERSION_GREATER_EQUAL _end)
    # No warning: pip does not show what a build prints that succeeds.
    message(FATAL_ERROR "tfswitch works with tensorflow${_range}, and "
                        "${python} has ${version}. Install one of these.")
  endif()
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  if(minor IN_LIST TFSWITCH_TENSORFLOW_MINORS)
    message(FATAL_ERROR "TFSWITCH_TENSORFLOW_PYTHONS has two Pythons with "
                        "TensorFlow ${minor}. Leave one of them out.")
  endif()
  message(STATUS "TensorFlow ${version} in ${lib}")

  # SYSTEM: no warnings from TensorFlow's headers, and its own Abseil and
  # protobuf are found before the machine's.
  set(target tensorflow_framework_${minor})
  add_library(${target} INTERFACE)
  target_include_directories(
    ${target} SYSTEM
    INTERFACE "${include}"
              # A header of TensorFlow includes <farmhash.h>, which is here.
              "${include}/external/farmhash_archive/src")
  target_compile_options(${target} INTERFACE ${compile_flags})
  target_link_libraries(${target} INTERFACE ${link_flags})

  list(APPEND TFSWITCH_TENSORFLOW_MINORS ${minor})
  set(TFSWITCH_TENSORFLOW_MINORS
      ${TFSWITCH_TENSORFLOW_MINORS}
      PARENT_SCOPE)
  list(APPEND TFSWITCH_TENSORFLOW_VERSIONS ${version})
  set(TFSWITCH_TENSORFLOW_VERSIONS
      ${TFSWITCH_TENSORFLOW_VERSIONS}
      PARENT_SCOPE)
  set(TFSWITCH_TENSORFLOW_${minor}_LIB
      "${lib}"
      PARENT_SCOPE)
  # The one that sees the environment that a package is built for.
  if(NOT _tensorflow_python)
    set(_tensorflow_python
        ${command}
        PARENT_SCOPE)
  endif()
endfunction()

foreach(_python IN LISTS TFSWITCH_TENSORFLOW_PYTHONS)
  tfswitch_find_tensorflow("${_python}")
endforeach()

# The newest, because what is linked with the C API of 2.19 and later runs with
# 2.18, and not the other way round: there a few functions have a version.
list(SORT TFSWITCH_TENSORFLOW_MINORS COMPARE NATURAL ORDER DESCENDING)
list(GET TFSWITCH_TENSORFLOW_MINORS 0 _minor)
add_library(tensorflow_framework ALIAS tensorflow_framework_${_minor})
add_library(tensorflow_cc INTERFACE)
target_link_libraries(
  tensorflow_cc
  INTERFACE tensorflow_framework
            "${TFSWITCH_TENSORFLOW_${_minor}_LIB}/libtensorflow_cc.so.2")

# One binary for all minors, because the C API does not change. Its headers come
# after those of the machine: TensorFlow has its own Abseil beside them.
set(TFSWITCH_TENSORFLOW_LIB "${TFSWITCH_TENSORFLOW_${_minor}_LIB}")
add_library(tensorflow_c INTERFACE)
get_target_property(_include tensorflow_framework INTERFACE_INCLUDE_DIRECTORIES)
list(GET _include 0 _include)
target_compile_options(tensorflow_c INTERFACE "SHELL:-idirafter \"${_include}\"")
target_link_libraries(
  tensorflow_c
  INTERFACE stdc++ # Before TensorFlow's, of which it exports some functions.
            "${TFSWITCH_TENSORFLOW_LIB}/libtensorflow_cc.so.2"
            "${TFSWITCH_TENSORFLOW_LIB}/libtensorflow_framework.so.2")
