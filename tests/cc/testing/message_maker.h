// Messages of protobuf as an input says: those of a good client, changed.

#ifndef TFSWITCH_TESTS_CC_TESTING_MESSAGE_MAKER_H_
#define TFSWITCH_TESTS_CC_TESTING_MESSAGE_MAKER_H_

#include <map>
#include <string>
#include <vector>

#include "google/protobuf/message.h"
#include "tests/cc/testing/choices.h"

namespace tfswitch {

// Not thread-safe.
class MessageMaker {
 public:
  // Keeps the fields of an answer.
  void Remember(const google::protobuf::Message& answer);

  // Gives fields that are not set the values that the last answer had under
  // their name, as a client does. Those that tell one table from another are
  // left as they are, because the last answer may be about another one.
  void FillIn(google::protobuf::Message* message) const;

  // Changes a field that is anywhere in it.
  void Change(Choices* choices, google::protobuf::Message* message) const;

 private:
  // By name and type, in text format.
  std::map<std::string, std::vector<std::string>> remembered_;
};

// `text` in text format, into the message; what is wrong in it is left out.
void MergeText(const std::string& text, google::protobuf::Message* message);

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_MESSAGE_MAKER_H_
