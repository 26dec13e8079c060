# What C++ users need: headers and a CMake package, in the Python package and,
# with the libraries and programs, in the prefix of `cmake --install`. Both have
# include/ and lib/cmake/; the libraries lie where tfswitchConfig.cmake says.
include(CMakePackageConfigHelpers)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/tfswitchConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)

function(tfswitch_install_headers folder)
  install(
    DIRECTORY "${PROJECT_SOURCE_DIR}/cc/predictor/include/tfswitch"
    DESTINATION "${folder}include"
    ${ARGN})
  install(
    FILES "${PROJECT_SOURCE_DIR}/cc/capi/tfswitch.h"
    DESTINATION "${folder}include/tfswitch"
    ${ARGN})
  install(
    FILES "${PROJECT_SOURCE_DIR}/cmake/tfswitchConfig.cmake"
          "${PROJECT_BINARY_DIR}/tfswitchConfigVersion.cmake"
    DESTINATION "${folder}lib/cmake/tfswitch"
    ${ARGN})
endfunction()

tfswitch_install_headers("tfswitch/" COMPONENT tfswitch_package EXCLUDE_FROM_ALL)
tfswitch_install_headers("")

set(_libraries ${TFSWITCH_LIBRARIES})
list(FILTER _libraries EXCLUDE REGEX "^tfswitch_native")
install(TARGETS ${_libraries} LIBRARY DESTINATION lib/tfswitch)
install(
  TARGETS ${TFSWITCH_PROGRAMS}
  RUNTIME DESTINATION lib/tfswitch/bin
  LIBRARY DESTINATION lib/tfswitch/bin)
# Where the predictor looks for TensorFlow if there is none beside its folder.
install(
  CODE "file(CREATE_LINK \"${TFSWITCH_TENSORFLOW_LIB}\"
    \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/lib/tfswitch/tensorflow\" SYMBOLIC)")
