# The files that the Python package carries beside its modules: the core, the
# ops, the pybind11 module and the programs. setup.py builds the target
# tfswitch_package and installs the component of the same name.
get_property(TFSWITCH_LIBRARIES GLOBAL PROPERTY TFSWITCH_LIBRARIES)
list(APPEND TFSWITCH_LIBRARIES tfswitch_core)
# The library lies beside the program that opens it.
set(TFSWITCH_PROGRAMS tfswitch-server tfswitch-serving tfswitch_serving_rpc)
set_target_properties(
  tfswitch_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${TFSWITCH_PACKAGE_DIR}")
set_target_properties(
  ${TFSWITCH_PROGRAMS}
  PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${TFSWITCH_PACKAGE_DIR}/bin"
             LIBRARY_OUTPUT_DIRECTORY "${TFSWITCH_PACKAGE_DIR}/bin")

add_custom_target(tfswitch_package)
add_dependencies(tfswitch_package ${TFSWITCH_LIBRARIES} ${TFSWITCH_PROGRAMS})
install(
  TARGETS ${TFSWITCH_LIBRARIES}
  LIBRARY DESTINATION tfswitch
          COMPONENT tfswitch_package
          EXCLUDE_FROM_ALL)
install(
  TARGETS ${TFSWITCH_PROGRAMS}
  RUNTIME DESTINATION tfswitch/bin
          COMPONENT tfswitch_package
          EXCLUDE_FROM_ALL
  LIBRARY DESTINATION tfswitch/bin
          COMPONENT tfswitch_package
          EXCLUDE_FROM_ALL)
include(${PROJECT_SOURCE_DIR}/cmake/tfswitch_install.cmake)

# The bill of materials, of the files above as they are installed. What is not a
# shared library comes with a file that tells which package of the system it is.
# The Python is the one that sees the environment.
list(JOIN TFSWITCH_TENSORFLOW_VERSIONS "," _tensorflows)
get_property(_pythons GLOBAL PROPERTY TFSWITCH_PYTHON_VERSIONS)
list(JOIN _pythons "," _pythons)
set(_sbom
    ${_tensorflow_python}
    "${PROJECT_SOURCE_DIR}/cmake/sbom.py"
    ${TFSWITCH_VERSION}
    abseil=${absl_VERSION}=
    grpc=${gRPC_VERSION}=
    libdeflate=${libdeflate_VERSION}=
    libevent=${libevent_libevent_core_VERSION}=
    nlohmann_json=${nlohmann_json_VERSION}=${nlohmann_json_CONFIG}
    openssl=${OPENSSL_VERSION}=
    prometheus-cpp=${prometheus_VERSION}=
    protobuf=${Protobuf_VERSION}=
    pybind11=${pybind11_VERSION}=
    python=${_pythons}=${Python_EXECUTABLE}
    tensorflow=${_tensorflows}=
    xxhash=${libxxhash_VERSION}=${libxxhash_INCLUDEDIR}/xxhash.h)
list(JOIN _sbom "]==] [==[" _sbom)
install(
  CODE "execute_process(
    COMMAND [==[${_sbom}]==] \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/tfswitch\"
    COMMAND_ERROR_IS_FATAL ANY)"
  COMPONENT tfswitch_package EXCLUDE_FROM_ALL)
