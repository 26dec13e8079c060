// A temporary folder for a test.

#ifndef TFSWITCH_TESTS_CC_TESTING_SCOPED_FOLDER_H_
#define TFSWITCH_TESTS_CC_TESTING_SCOPED_FOLDER_H_

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace tfswitch {

// A new folder, which the destructor removes.
class ScopedFolder {
 public:
  ScopedFolder() : ScopedFolder(std::filesystem::temp_directory_path()) {}
  // A folder in `parent`.
  explicit ScopedFolder(const std::filesystem::path& parent) {
    std::string pattern = (parent / "tfswitch_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~ScopedFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScopedFolder(const ScopedFolder&) = delete;
  ScopedFolder& operator=(const ScopedFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_SCOPED_FOLDER_H_
