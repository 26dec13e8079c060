// Changes the protobuf messages of a good client as an input says.

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

  // Sets unset fields to the values that the last answer had in fields of the
  // same name, as a client does. Does not change fields that identify a table,
  // because the last answer may be about another table.
  void FillIn(google::protobuf::Message* message) const;

  // Changes one field at any depth.
  void Change(Choices* choices, google::protobuf::Message* message) const;

 private:
  // The keys are made of name and type, and the values are in text format.
  std::map<std::string, std::vector<std::string>> remembered_;
};

// Merges `text`, in text format, into the message. Skips what is invalid.
void MergeText(const std::string& text, google::protobuf::Message* message);

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_MESSAGE_MAKER_H_
