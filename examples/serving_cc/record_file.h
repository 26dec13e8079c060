// Reads the inputs of a model from files.

#ifndef EXAMPLES_SERVING_CC_RECORD_FILE_H_
#define EXAMPLES_SERVING_CC_RECORD_FILE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tfswitch/status.h"
#include "tfswitch/values.h"

namespace example {

// A file of records. Each record has one row of every input of a signature.
// Other features or columns are ignored.
//
//   .tfrecord, .tfrecord.gz   tf.train.Example, features named as the inputs
//   .csv                      a header that names the inputs; several values of
//                             a cell are separated by `separator`, unless the
//                             input takes one value per row. Cells may be
//                             quoted; a quoted line break is not understood.
//
// Errors name the file and the record, counted from 1; a CSV file's first
// record is its second line.
//
// Not thread-safe.
class RecordFile {
 public:
  // Opens a file. InvalidArgument for a file of another kind, a CSV file
  // without an input's column, or an input that does not have one row per
  // record.
  static tfswitch::Result<std::unique_ptr<RecordFile>> Open(
      const std::string& path, const tfswitch::Signature& signature,
      char separator);

  virtual ~RecordFile() = default;

  // Reads the next record's rows: shape and data without the first dimension.
  // OutOfRange at the end of the file.
  virtual tfswitch::Status Read(tfswitch::NamedValues* rows) = 0;

 protected:
  RecordFile(const std::string& path, const tfswitch::Signature& signature)
      : path_(path), inputs_(signature.inputs) {}

  // An error that begins with the file and the record that is being read.
  tfswitch::Status ErrorHere(const std::string& message) const;

  const std::string path_;
  const std::map<std::string, tfswitch::TensorSpec> inputs_;
  int64_t record_ = 0;
};

// The texts, with the separator between them.
std::string Join(const std::vector<std::string>& texts,
                 const std::string& separator);

// Returns the parts between the separators.
std::vector<std::string> Split(const std::string& text, char separator);

// Whether all of the text is an integer.
bool ParseInteger(const std::string& text, int64_t* value);

}  // namespace example

#endif  // EXAMPLES_SERVING_CC_RECORD_FILE_H_
