# find_package(tfswitch CONFIG) gives
#
#   tfswitch::capi         the header tfswitch/tfswitch.h
#   tfswitch_CORE_LIBRARY  the core, which a program opens with
#                          dlopen(RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND) and does
#                          not link
#   tfswitch::predictor    libtfswitch_predictor.so and its headers
#                          (tfswitch/predictor.h), which serve SavedModels
#
# The predictor needs a TensorFlow of those that this tfswitch has ops for: that
# of -DTFSWITCH_TENSORFLOW_DIR=, which is the folder of libtensorflow_cc.so.2, or
# that of -DPython_EXECUTABLE=, or that beside tfswitch, or that of python3. The
# program then finds it there; elsewhere by LD_LIBRARY_PATH or a RUNPATH. With
# COMPONENTS capi there is no predictor, and no TensorFlow is needed.
get_filename_component(_tfswitch_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.."
                       REALPATH)
# The Python package has its libraries in its own folder.
set(_tfswitch_libraries "${_tfswitch_prefix}/lib/tfswitch")
if(NOT EXISTS "${_tfswitch_libraries}")
  set(_tfswitch_libraries "${_tfswitch_prefix}")
endif()

set(tfswitch_CORE_LIBRARY "${_tfswitch_libraries}/libtfswitch_core.so")
if(NOT TARGET tfswitch::capi)
  add_library(tfswitch::capi INTERFACE IMPORTED)
  set_target_properties(
    tfswitch::capi PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
                              "${_tfswitch_prefix}/include")
endif()
if(tfswitch_FIND_COMPONENTS AND NOT "predictor" IN_LIST tfswitch_FIND_COMPONENTS)
  return()
endif()

if(NOT TFSWITCH_TENSORFLOW_DIR)
  set(_tfswitch_places "${_tfswitch_libraries}/../tensorflow"
                       "${_tfswitch_libraries}/tensorflow")
  set(_tfswitch_python "${Python_EXECUTABLE}")
  if(NOT _tfswitch_python)
    set(_tfswitch_python python3)
  endif()
  execute_process(
    COMMAND
      "${_tfswitch_python}" -c "import importlib.util, os
spec = importlib.util.find_spec('tensorflow')
print(os.path.dirname(spec.origin) if spec else '')"
    OUTPUT_VARIABLE _tfswitch_found
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  # find_package(Python) sets a variable of that name, and none of the cache.
  if(DEFINED CACHE{Python_EXECUTABLE})
    list(PREPEND _tfswitch_places "${_tfswitch_found}")
  else()
    list(APPEND _tfswitch_places "${_tfswitch_found}")
  endif()
  find_path(
    TFSWITCH_TENSORFLOW_DIR libtensorflow_cc.so.2
    PATHS ${_tfswitch_places}
    NO_DEFAULT_PATH
    DOC "The folder of libtensorflow_cc.so.2")
endif()
if(NOT EXISTS "${TFSWITCH_TENSORFLOW_DIR}/libtensorflow_cc.so.2")
  set(tfswitch_FOUND FALSE)
  set(tfswitch_NOT_FOUND_MESSAGE
      "there is no libtensorflow_cc.so.2 in '${TFSWITCH_TENSORFLOW_DIR}'. Give \
the folder of a TensorFlow with -DTFSWITCH_TENSORFLOW_DIR=, or a Python that has \
one with -DPython_EXECUTABLE=.")
  return()
endif()

if(NOT TARGET tfswitch::predictor)
  set(_tfswitch_cc "${TFSWITCH_TENSORFLOW_DIR}/libtensorflow_cc.so.2")
  set(_tfswitch_framework
      "${TFSWITCH_TENSORFLOW_DIR}/libtensorflow_framework.so.2")
  add_library(tfswitch::predictor SHARED IMPORTED)
  set_target_properties(
    tfswitch::predictor
    PROPERTIES
      IMPORTED_LOCATION "${_tfswitch_libraries}/libtfswitch_predictor.so"
      INTERFACE_COMPILE_FEATURES cxx_std_17
      INTERFACE_INCLUDE_DIRECTORIES "${_tfswitch_prefix}/include"
      # A program calls none of their functions, and needs their folder.
      INTERFACE_LINK_OPTIONS
      "LINKER:--push-state,--no-as-needed,${_tfswitch_cc},${_tfswitch_framework},--pop-state"
      # Once more, for the RUNPATH that CMake makes.
      INTERFACE_LINK_LIBRARIES "${_tfswitch_cc};${_tfswitch_framework}")
endif()
