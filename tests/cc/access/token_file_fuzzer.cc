// Fuzz target: files of tokens, and the tokens that callers show.
//
//   token_file_fuzzer -max_total_time=60

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cc/access/tokens.h"
#include "tests/cc/testing/fuzz_target.h"

std::vector<std::string> tfswitch::FuzzSeeds() {
  const std::string record =
      R"({"id": "0123456789ab", "role": "train", "tables": ["user*", "i?em"],)"
      R"("created": "2026-11-25T22:00:12Z", "expires": "2027-02-23T22:00:12Z",)"
      R"("note": "n", "max_rows": 5, "max_calls_in_flight": 4, "sha256": ")" +
      std::string(64, 'a') + "\"}";
  return {R"({"tokens": []})", R"({"tokens": [)" + record + "]}",
          R"({"tokens": [)" + record + "," + record + "]}",
          "tfswitch_0123456789ab_" + std::string(64, 'b'), "*a?b*"};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto records = tfswitch::ParseTokenFile(text);
  if (records.ok()) {
    for (const tfswitch::TokenRecord& record : *records) {
      // Accepted records have a role and tables.
      if (record.role == tfswitch::v1::ROLE_UNSPECIFIED ||
          record.tables.empty() || record.id.size() != 12) {
        std::abort();
      }
      (void)record.MayUse(text.substr(0, 100));
    }
  }
  const auto id = tfswitch::TokenId(text);
  if (id.ok() && id->size() != 12) std::abort();
  (void)tfswitch::MatchesPattern(text.substr(0, size / 2),
                                 text.substr(size / 2));
  return 0;
}
