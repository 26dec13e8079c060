// libFuzzer target: the files of models and of examples that the predictor
// reads without protobuf.
//
//   model_files_fuzzer -max_total_time=60 CORPUS

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cc/predictor/example_parser.h"
#include "cc/predictor/meta_graph.h"
#include "cc/predictor/wire.h"
#include "tests/cc/testing/fuzz_target.h"

namespace {

std::string Field(uint32_t number, const std::string& bytes) {
  std::string message;
  tfswitch::AppendBytes(number, bytes, &message);
  return message;
}

}  // namespace

std::vector<std::string> tfswitch::FuzzSeeds() {
  const std::string shape = Field(2, "\x08\x02") + Field(2, "\x08\xff\x01");
  const std::string spec = Field(1, "in:0") + "\x10\x09" + Field(3, shape);
  const std::string entry = Field(1, "ids") + Field(2, spec);
  const std::string function =
      Field(1, Field(1, "f")) + Field(3, Field(2, "Op"));
  return {
      Field(2, Field(1, Field(4, "serve") + Field(5, "2.21")) +
                   Field(2, Field(1, Field(2, "Op")) +
                                Field(2, Field(1, function))) +
                   Field(5, Field(1, "s") +
                                Field(2, Field(1, entry) + Field(4, entry)))),
      Field(1, Field(1, Field(1, "x") + Field(2, Field(3, Field(1, "\x07"))))),
      Field(1, Field(1, Field(1, "x") + Field(2, Field(2, Field(1, "1234"))))),
  };
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  (void)tfswitch::ParseSavedModel(bytes, {"serve"});
  (void)tfswitch::ParseOpNames(bytes);
  tfswitch::Features features;
  (void)tfswitch::ParseExample(bytes, &features);
  return 0;
}
