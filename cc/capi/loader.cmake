# tfswitch_core_loader: how code outside the core library reaches it. It brings
# no header and no symbol of the core but cc/capi/tfswitch.h.
#
# The loader looks for the core beside the library that asks, so all that opens
# it, and the core itself, are built into TFSWITCH_PACKAGE_DIR: the build tree's
# picture of the Python package.
set(TFSWITCH_PACKAGE_DIR "${PROJECT_BINARY_DIR}/package/tfswitch")

if(NOT TARGET tfswitch_core_loader)
  add_library(tfswitch_core_loader STATIC
              ${PROJECT_SOURCE_DIR}/cc/capi/core_loader.cc)
  target_include_directories(tfswitch_core_loader PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(tfswitch_core_loader PUBLIC ${CMAKE_DL_LIBS})
  target_compile_definitions(tfswitch_core_loader
                             PRIVATE TFSWITCH_VERSION="${TFSWITCH_VERSION}")
  target_compile_options(tfswitch_core_loader PRIVATE ${TFSWITCH_WARNINGS})
endif()
