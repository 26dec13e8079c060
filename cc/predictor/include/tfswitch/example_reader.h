// Reads TFRecord files of tf.train.Example.

#ifndef TFSWITCH_EXAMPLE_READER_H_
#define TFSWITCH_EXAMPLE_READER_H_

#include <map>
#include <memory>
#include <string>
#include <variant>

#include "tfswitch/status.h"
#include "tfswitch/values.h"

namespace tfswitch {

// The values of a feature. If the feature has no list, this is monostate, which
// counts as an empty list of any type.
using Feature = std::variant<std::monostate, Integers, Floats, Strings>;
using Features = std::map<std::string, Feature>;

// Not thread-safe.
class TFSWITCH_EXPORTED ExampleReader {
 public:
  // If the file's name ends in ".gz", the file is decompressed.
  static Result<std::unique_ptr<ExampleReader>> Open(const std::string& path);
  ~ExampleReader();

  // Reads the next record. OutOfRange at the end of the file. DataLoss for a
  // record that is damaged or not a tf.train.Example.
  Result<Features> Read();

 private:
  struct File;

  explicit ExampleReader(std::unique_ptr<File> file);

  const std::unique_ptr<File> file_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_EXAMPLE_READER_H_
