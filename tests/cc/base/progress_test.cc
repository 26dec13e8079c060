#include "cc/base/progress.h"

#include <string>

#include "cc/base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

TEST(ProgressTest, SaysAgainAndAgainHowFarItIs) {
  Mutex mutex;
  CondVar changed;
  std::string line;
  Progress::Options options;
  options.first = options.every = absl::Milliseconds(1);
  options.print = [&](const std::string& text) {
    MutexLock lock(&mutex);
    line = text;
    changed.NotifyAll();
  };
  const auto wait_for = [&](const std::string& part) {
    MutexLock lock(&mutex);
    while (line.find(part) == std::string::npos) changed.Wait(&mutex);
  };
  Progress progress("saving to 'ckpt'", 200, options);

  wait_for("200 rows");
  progress.Add(50);
  wait_for("50 of 200 rows (25%)");

  MutexLock lock(&mutex);
  EXPECT_THAT(line, HasSubstr("saving to 'ckpt': "));
}

TEST(ProgressTest, AShortCallSaysNothing) {
  std::string line;
  Progress::Options options;
  options.first = absl::Hours(1);
  options.print = [&](const std::string& text) { line = text; };
  Progress("saving to 'ckpt'", 200, options).Add(50);

  EXPECT_EQ(line, "");
}

}  // namespace
}  // namespace tfswitch
