# The files that the Python package carries beside its modules: the core, the
# ops, the pybind11 module and the programs. setup.py builds the target
# tfswitch_package and installs the component of the same name.
set(TFSWITCH_LIBRARIES tfswitch_core tfswitch_ops tfswitch_native)
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
install(TARGETS ${TFSWITCH_LIBRARIES} LIBRARY DESTINATION tfswitch
                                              COMPONENT tfswitch_package)
install(
  TARGETS ${TFSWITCH_PROGRAMS}
  RUNTIME DESTINATION tfswitch/bin COMPONENT tfswitch_package
  LIBRARY DESTINATION tfswitch/bin COMPONENT tfswitch_package)
