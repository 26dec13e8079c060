// The Python exception for each error of the C API, in one table.

#ifndef TFSWITCH_CC_PYBIND_STATUS_EXCEPTIONS_H_
#define TFSWITCH_CC_PYBIND_STATUS_EXCEPTIONS_H_

#include <Python.h>

#include <stdexcept>
#include <string>

namespace tfswitch {

// Thrown when a call of the C API has failed; the module's translator converts
// it to a Python exception.
class StatusError : public std::runtime_error {
 public:
  StatusError(int code, const std::string& message)
      : std::runtime_error(message), code_(code) {}

  int code() const { return code_; }

 private:
  int code_;
};

// Returns a borrowed reference. `code` is a value of absl::StatusCode. The
// values are written as numbers, because this code must not include Abseil's
// headers.
inline PyObject* ExceptionOf(int code) {
  switch (code) {
    case 3:   // InvalidArgument
    case 6:   // AlreadyExists
    case 11:  // OutOfRange
      return PyExc_ValueError;
    case 4:  // DeadlineExceeded
      return PyExc_TimeoutError;
    case 5:  // NotFound
      return PyExc_KeyError;
    case 12:  // Unimplemented
      return PyExc_NotImplementedError;
    case 14:  // Unavailable
      return PyExc_ConnectionError;
    case 15:  // DataLoss
      return PyExc_OSError;
    case 7:   // PermissionDenied
    case 16:  // Unauthenticated
      return PyExc_PermissionError;
    default:  // FailedPrecondition, ResourceExhausted, Internal, ...
      return PyExc_RuntimeError;
  }
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_PYBIND_STATUS_EXCEPTIONS_H_
