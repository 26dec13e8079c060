// Protobuf's own parser as the judge of the wire decoder, for the unit test and
// the fuzzer.

#ifndef TFSWITCH_TESTS_CC_WIRE_CODEC_ORACLE_H_
#define TFSWITCH_TESTS_CC_WIRE_CODEC_ORACLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tfswitch {

// Reads `bytes`, cut into pieces by `cut_seed`, with codec.h and with protobuf,
// as each message that the codec knows. Both must accept it or refuse it, and
// see the same values. Returns what differs; empty if nothing does.
std::string CompareWithProtobuf(absl::string_view bytes, uint32_t cut_seed);

// Valid messages of all kinds, to start mutations from.
std::vector<std::string> SeedMessages();

// Copies of parts of `whole` as pieces of odd sizes at odd addresses; each in a
// block of its own, so that reading past its end is seen by AddressSanitizer.
class CutMessage {
 public:
  // `cut_seed` 0: one piece.
  CutMessage(absl::string_view whole, uint32_t cut_seed);

  const std::vector<absl::string_view>& pieces() const { return pieces_; }

 private:
  std::vector<std::vector<char>> blocks_;
  std::vector<absl::string_view> pieces_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_WIRE_CODEC_ORACLE_H_
