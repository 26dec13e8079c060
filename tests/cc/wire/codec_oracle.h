// Compares the wire decoder with protobuf's own parser, for the unit test and
// the fuzzer.

#ifndef TFSWITCH_TESTS_CC_WIRE_CODEC_ORACLE_H_
#define TFSWITCH_TESTS_CC_WIRE_CODEC_ORACLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tfswitch {

// Reads `bytes`, cut into pieces by `cut_seed`, with codec.h and with protobuf,
// as each message that the codec knows. Both must accept or refuse the message,
// and read the same values. Returns the difference; empty if there is none.
std::string CompareWithProtobuf(absl::string_view bytes, uint32_t cut_seed);

// Valid messages of all kinds, to start mutations from.
std::vector<std::string> SeedMessages();

// Copies of parts of `whole` as pieces of odd sizes at odd addresses. Each
// piece is a separate allocation, so that AddressSanitizer sees reads past its
// end.
class CutMessage {
 public:
  // With `cut_seed` 0 there is one piece.
  CutMessage(absl::string_view whole, uint32_t cut_seed);

  const std::vector<absl::string_view>& pieces() const { return pieces_; }

 private:
  std::vector<std::vector<char>> blocks_;
  std::vector<absl::string_view> pieces_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_WIRE_CODEC_ORACLE_H_
