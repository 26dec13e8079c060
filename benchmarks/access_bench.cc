// Measures how long a server takes to check a caller's rights: it finds the
// token of the call in the token file, and applies the rules for a method and a
// table.
//
// The bar: under 1 us a call.

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "benchmarks/bench_support.h"
#include "cc/access/token_list.h"

namespace tfswitch {
namespace {

constexpr int kTokens = 100;
constexpr int kCalls = 200000;
constexpr int kReps = 9;

std::string TokenText(int number) {
  return absl::StrCat("tfswitch_", absl::StrFormat("%012x", number), "_",
                      std::string(64, 'b'));
}

std::string WriteFile() {
  const std::string path = absl::StrCat("/tmp/access_bench.", getpid());
  std::ofstream file(path);
  file << R"({"tokens": [)";
  for (int i = 0; i < kTokens; ++i) {
    const std::string token = TokenText(i);
    const auto hash = HashToken(token);
    if (!hash.has_value()) Die("no hash");
    file << (i == 0 ? "" : ",")
         << absl::StrCat(R"({"id": ")", *TokenId(token),
                         R"(", "role": "train", )",
                         R"("tables": ["item*", "user*"], "sha256": ")",
                         absl::BytesToHexString(
                             {reinterpret_cast<const char*>(hash->data()),
                              hash->size()}),
                         "\"}");
  }
  file << "]}";
  return path;
}

int Run() {
  const std::string path = WriteFile();
  auto list = TokenList::Open(path);
  Check(list.status());
  std::vector<std::string> shown;
  for (int i = 0; i < kTokens; ++i) shown.push_back(TokenText(i));
  std::vector<double> ns;
  for (int r = 0; r < kReps; ++r) {
    const double start = WallSeconds();
    for (int i = 0; i < kCalls; ++i) {
      const auto token = (*list)->Find(shown[i % kTokens]);
      Check(token.status());
      const TokenRecord& record = (*token)->record;
      if (!record.MayUse("user_7") || record.role < v1::ROLE_TRAIN) Die("no");
      Check((*token)->use->Enter(record));
      Check((*token)->use->Add(record, 1000));
      (*token)->use->Leave(1000);
    }
    ns.push_back((WallSeconds() - start) / kCalls * 1e9);
  }
  unlink(path.c_str());
  std::printf("check of rights: %.0f ns a call, median of %d\n", Median(ns),
              kReps);
  Report("security | check of the rights of a call | figure", "ns", ns,
         "at most 1000");
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main() { return tfswitch::Run(); }
