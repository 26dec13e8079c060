# Asks the Python of the build for TensorFlow's flags. Importing TensorFlow
# takes seconds, so the answer is cached until another TensorFlow is found.
#
#   tensorflow_framework   headers, compile flags and the library that ops link
#   tensorflow_cc          libtensorflow_cc.so.2, for C++ programs
#   TFSWITCH_TENSORFLOW_VERSION
#
# Set Python_EXECUTABLE to choose the Python; without it the virtual environment
# `.venv` of the checkout is taken if there is one.

if(NOT Python_EXECUTABLE AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

# Cheap: finds the package without importing it. While pip builds a package, it
# hides the environment that it installs into, by means of PYTHONPATH. With -E
# the interpreter does not read that variable, and sees the environment.
foreach(_option "" -E)
  set(_tensorflow_python "${Python_EXECUTABLE}" ${_option})
  execute_process(
    COMMAND
      ${_tensorflow_python} -c "import importlib.util, os
spec = importlib.util.find_spec('tensorflow')
path = os.path.join(os.path.dirname(spec.origin), 'libtensorflow_framework.so.2')
print(path, os.stat(path).st_mtime_ns)"
    OUTPUT_VARIABLE _tensorflow_key
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE _tensorflow_error
    RESULT_VARIABLE _tensorflow_result)
  if(_tensorflow_result EQUAL 0)
    break()
  endif()
endforeach()
if(NOT _tensorflow_result EQUAL 0)
  message(
    FATAL_ERROR
      "${Python_EXECUTABLE} has no TensorFlow. Install tensorflow>=2.18,<2.22 "
      "or tensorflow-cpu for it, choose another Python with "
      "-DPython_EXECUTABLE=..., or build without the ops with "
      "-DTFSWITCH_BUILD_PYTHON=OFF.\n${_tensorflow_error}")
endif()

if(NOT "${_tensorflow_key}" STREQUAL "${TFSWITCH_TENSORFLOW_KEY}")
  # Marked, because TensorFlow may print to stdout while it is imported.
  execute_process(
    COMMAND
      "${CMAKE_COMMAND}" -E env CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3
      ${_tensorflow_python} -c "import os
import tensorflow as tf
print('<<' + '|'.join([
    tf.__version__,
    tf.sysconfig.get_include(),
    tf.sysconfig.get_lib(),
    ';'.join(f for f in tf.sysconfig.get_compile_flags()
             if not f.startswith(('-I', '--std'))),
    ';'.join(tf.sysconfig.get_link_flags()),
]) + '>>')"
    OUTPUT_VARIABLE _tensorflow_flags
    ERROR_VARIABLE _tensorflow_error
    RESULT_VARIABLE _tensorflow_result)
  if(NOT _tensorflow_result EQUAL 0
     OR NOT _tensorflow_flags MATCHES
        "<<([^|]*)\\|([^|]*)\\|([^|]*)\\|([^|]*)\\|([^|]*)>>")
    message(FATAL_ERROR "TensorFlow of ${Python_EXECUTABLE} cannot be "
                        "imported:\n${_tensorflow_error}")
  endif()
  set(_tensorflow_names VERSION INCLUDE LIB COMPILE_FLAGS LINK_FLAGS)
  foreach(_index RANGE 4)
    list(GET _tensorflow_names ${_index} _name)
    math(EXPR _group "${_index} + 1")
    set(TFSWITCH_TENSORFLOW_${_name}
        "${CMAKE_MATCH_${_group}}"
        CACHE INTERNAL "TensorFlow of the build's Python")
  endforeach()
  set(TFSWITCH_TENSORFLOW_KEY
      "${_tensorflow_key}"
      CACHE INTERNAL "Which TensorFlow the flags are of")
endif()
if(TFSWITCH_TENSORFLOW_VERSION VERSION_LESS 2.18
   OR TFSWITCH_TENSORFLOW_VERSION VERSION_GREATER_EQUAL 2.22)
  # No warning: pip does not show what a build prints that succeeds.
  message(FATAL_ERROR "tfswitch works with TensorFlow 2.18 to 2.21, and "
                      "${Python_EXECUTABLE} has "
                      "${TFSWITCH_TENSORFLOW_VERSION}. Install one of these.")
endif()
message(STATUS "TensorFlow ${TFSWITCH_TENSORFLOW_VERSION} in "
               "${TFSWITCH_TENSORFLOW_LIB}")

# SYSTEM: no warnings from TensorFlow's headers, and its own Abseil and
# protobuf are found before the machine's.
add_library(tensorflow_framework INTERFACE)
target_include_directories(tensorflow_framework SYSTEM
                           INTERFACE "${TFSWITCH_TENSORFLOW_INCLUDE}")
target_compile_options(tensorflow_framework
                       INTERFACE ${TFSWITCH_TENSORFLOW_COMPILE_FLAGS})
target_link_libraries(tensorflow_framework
                      INTERFACE ${TFSWITCH_TENSORFLOW_LINK_FLAGS})

add_library(tensorflow_cc INTERFACE)
target_link_libraries(
  tensorflow_cc INTERFACE tensorflow_framework
                          "${TFSWITCH_TENSORFLOW_LIB}/libtensorflow_cc.so.2")
