# find_package(tfswitch CONFIG) gives
#
#   tfswitch::predictor    libtfswitch_predictor.so and its headers
#                          (tfswitch/predictor.h), which serve SavedModels
#   tfswitch::capi         the header tfswitch/tfswitch.h
#   tfswitch_CORE_LIBRARY  the core, which a program opens with
#                          dlopen(RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND) and does
#                          not link
#
# The predictor needs a TensorFlow of those that this tfswitch has ops for: that
# of -DTFSWITCH_TENSORFLOW_DIR=, which is the folder of libtensorflow_cc.so.2, or
# that beside tfswitch, or that of -DPython_EXECUTABLE=, else of python3. The
# program then finds it there; elsewhere by LD_LIBRARY_PATH or a RUNPATH.
get_filename_component(_tfswitch_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.."
                       REALPATH)
# The Python package has its libraries in its own folder.
set(_tfswitch_libraries "${_tfswitch_prefix}/lib/tfswitch")
if(NOT EXISTS "${_tfswitch_libraries}")
  set(_tfswitch_libraries "${_tfswitch_prefix}")
endif()

if(NOT TFSWITCH_TENSORFLOW_DIR)
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
  find_path(
    TFSWITCH_TENSORFLOW_DIR libtensorflow_cc.so.2
    PATHS "${_tfswitch_libraries}/../tensorflow"
          "${_tfswitch_libraries}/tensorflow" "${_tfswitch_found}"
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

set(tfswitch_CORE_LIBRARY "${_tfswitch_libraries}/libtfswitch_core.so")
if(NOT TARGET tfswitch::predictor)
  add_library(tfswitch::capi INTERFACE IMPORTED)
  set_target_properties(
    tfswitch::capi PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
                              "${_tfswitch_prefix}/include")
  add_library(tfswitch::predictor SHARED IMPORTED)
  set_target_properties(
    tfswitch::predictor
    PROPERTIES
      IMPORTED_LOCATION "${_tfswitch_libraries}/libtfswitch_predictor.so"
      INTERFACE_COMPILE_FEATURES cxx_std_17
      INTERFACE_INCLUDE_DIRECTORIES "${_tfswitch_prefix}/include"
      # A program calls none of its functions, and needs its folder.
      INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed"
      INTERFACE_LINK_LIBRARIES
      "${TFSWITCH_TENSORFLOW_DIR}/libtensorflow_cc.so.2;${TFSWITCH_TENSORFLOW_DIR}/libtensorflow_framework.so.2"
  )
endif()
