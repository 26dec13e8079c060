# The files that the Python package carries beside its modules: the core, the
# ops, the pybind11 module and the server program. setup.py builds the target
# tfswitch_package and installs the component of the same name.
set_target_properties(
  tfswitch_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${TFSWITCH_PACKAGE_DIR}")
set_target_properties(
  tfswitch-server PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                             "${TFSWITCH_PACKAGE_DIR}/bin")

add_custom_target(tfswitch_package)
add_dependencies(tfswitch_package tfswitch_core tfswitch_ops tfswitch_native
                 tfswitch-server)
install(
  TARGETS tfswitch_core tfswitch_ops tfswitch_native
  LIBRARY DESTINATION tfswitch COMPONENT tfswitch_package)
install(TARGETS tfswitch-server RUNTIME DESTINATION tfswitch/bin
                                        COMPONENT tfswitch_package)
