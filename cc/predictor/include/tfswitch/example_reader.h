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

// The list of a feature; monostate for a feature without a list, which counts
// as an empty list of any type.
using Feature = std::variant<std::monostate, Integers, Floats, Strings>;
using Features = std::map<std::string, Feature>;

// Not thread-safe.
class TFSWITCH_EXPORTED ExampleReader {
 public:
  // A file whose name ends in ".gz" is inflated.
  static Result<std::unique_ptr<ExampleReader>> Open(const std::string& path);
  ~ExampleReader();

  // OutOfRange at the end of the file. DataLoss for a record that is damaged or
  // is no tf.train.Example.
  Result<Features> Read();

 private:
  struct File;

  explicit ExampleReader(std::unique_ptr<File> file);

  const std::unique_ptr<File> file_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_EXAMPLE_READER_H_
