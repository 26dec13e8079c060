# One static library per room. What a room links is what it may include, so
# the one-way dependencies of docs/architecture.md are enforced by the build.
#
#   tfswitch_cc_library(table SRCS a.cc DEPS tfswitch_base absl::status)
function(tfswitch_cc_library room)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_library(tfswitch_${room} STATIC ${ARG_SRCS})
  target_include_directories(tfswitch_${room} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(tfswitch_${room} PUBLIC ${ARG_DEPS})
  target_compile_options(tfswitch_${room} PRIVATE ${TFSWITCH_WARNINGS})
endfunction()

# A GoogleTest program registered with ctest under its own name. One that starts
# no thread says so: ThreadSanitizer has nothing to find in it.
#
#   tfswitch_cc_test(embedding_table_test SRCS x_test.cc DEPS tfswitch_table)
#   tfswitch_cc_test(hash_test SINGLE_THREADED SRCS x_test.cc DEPS tfswitch_base)
function(tfswitch_cc_test name)
  cmake_parse_arguments(ARG "SINGLE_THREADED" "TIMEOUT" "SRCS;DEPS" ${ARGN})
  if(ARG_SINGLE_THREADED AND TFSWITCH_SANITIZER STREQUAL "thread")
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock
                                        GTest::gtest_main)
  # The rooms stay optimised; a test's own code builds in two thirds of the time
  # of -O2.
  target_compile_options(${name} PRIVATE -Og ${TFSWITCH_WARNINGS})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
endfunction()
