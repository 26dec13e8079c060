# A test that hangs fails after so many seconds. Sanitizers make tests slow.
set(TFSWITCH_TEST_TIMEOUT 300)
if(TFSWITCH_SANITIZER)
  set(TFSWITCH_TEST_TIMEOUT 1800)
endif()

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

# One GoogleTest program with the tests of a room, registered with ctest under
# the room's name: tfswitch_table_tests. Sources whose tests start no thread are
# named apart, because ThreadSanitizer has nothing to find in them.
#
#   tfswitch_cc_tests(table SRCS a_test.cc SINGLE_THREADED b_test.cc
#                     DEPS tfswitch_table)
function(tfswitch_cc_tests room)
  cmake_parse_arguments(ARG "" "" "SRCS;SINGLE_THREADED;DEPS" ${ARGN})
  if(NOT TFSWITCH_SANITIZER STREQUAL "thread")
    list(APPEND ARG_SRCS ${ARG_SINGLE_THREADED})
  endif()
  if(NOT ARG_SRCS)
    return()
  endif()
  set(name tfswitch_${room}_tests)
  add_executable(${name} ${ARG_SRCS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock
                                        GTest::gtest_main)
  # The rooms stay optimised; a test's own code builds in two thirds of the time
  # of -O2.
  target_compile_options(${name} PRIVATE -Og ${TFSWITCH_WARNINGS})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${TFSWITCH_TEST_TIMEOUT})
  if(TFSWITCH_SANITIZER STREQUAL "thread"
     AND ("tfswitch_rpc_client" IN_LIST ARG_DEPS OR "tfswitch_core" IN_LIST ARG_DEPS))
    # Debian's gRPC is not instrumented, and its locks and queues are atomics
    # that ThreadSanitizer cannot see: memory that gRPC hands from thread to
    # thread looks shared without order. Accesses made inside it are left out;
    # those of this project's code are all checked.
    set_tests_properties(
      ${name} PROPERTIES ENVIRONMENT
                         "TSAN_OPTIONS=ignore_noninstrumented_modules=1")
  endif()
endfunction()

# The fuzz target NAME_fuzzer of NAME_fuzzer.cc; see tests/cc/testing/fuzz_main.cc.
# With TFSWITCH_BUILD_FUZZERS it is one of libFuzzer, else with AddressSanitizer
# an ordinary test.
#
#   tfswitch_cc_fuzzer(row_file SRCS crafted_row_file.cc DEPS tfswitch_serving)
function(tfswitch_cc_fuzzer name)
  if(NOT TFSWITCH_SANITIZER MATCHES "address")
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  set(name ${name}_fuzzer)
  add_executable(${name} ${name}.cc ${ARG_SRCS}
                         ${PROJECT_SOURCE_DIR}/tests/cc/testing/fuzz_main.cc)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} absl::strings absl::time)
  target_compile_options(${name} PRIVATE ${TFSWITCH_WARNINGS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                                           "${PROJECT_BINARY_DIR}/fuzzers")
  if(TFSWITCH_BUILD_FUZZERS)
    target_compile_definitions(${name} PRIVATE TFSWITCH_BUILD_FUZZERS)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  else()
    add_test(NAME ${name} COMMAND ${name} -max_total_time=60)
    set_tests_properties(${name} PROPERTIES TIMEOUT ${TFSWITCH_TEST_TIMEOUT})
  endif()
endfunction()
