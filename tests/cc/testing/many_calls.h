// Arguments that tests pass to StartPull and StartPush.

#ifndef TFSWITCH_TESTS_CC_TESTING_MANY_CALLS_H_
#define TFSWITCH_TESTS_CC_TESTING_MANY_CALLS_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cc/client/parameter_client.h"

namespace tfswitch {

// The arguments of several calls, with what they point to.
class ManyCalls {
 public:
  void AddPull(const std::string& table, int dim, std::vector<Key> keys,
               bool insert_missing = false) {
    Part& part = AddPart(std::move(keys), dim, 0.0f);
    PullPart pull;
    pull.args.table = table;
    pull.args.dim = dim;
    pull.args.keys = part.keys;
    pull.args.insert_missing = insert_missing;
    pull.embeddings = absl::MakeSpan(part.floats);
    pulls.push_back(std::move(pull));
  }

  // Every gradient is `gradient`, the learning rate 1.
  PushArgs& AddPush(const std::string& table, int dim, std::vector<Key> keys,
                    float gradient, PushId id = {}) {
    Part& part = AddPart(std::move(keys), dim, gradient);
    PushPart push;
    push.args.table = table;
    push.args.dim = dim;
    push.args.keys = part.keys;
    push.args.gradients = part.floats;
    push.args.learning_rate = 1.0f;
    push.args.insert_missing = true;
    push.args.id = id;
    push.result = &part.result;
    pushes.push_back(std::move(push));
    return pushes.back().args;
  }

  const std::vector<float>& floats(size_t part) const {
    return parts_[part]->floats;
  }
  const WriteResult& result(size_t part) const { return parts_[part]->result; }

  std::vector<PullPart> pulls;
  std::vector<PushPart> pushes;

 private:
  struct Part {
    std::vector<Key> keys;
    std::vector<float> floats;
    WriteResult result;
  };

  Part& AddPart(std::vector<Key> keys, int dim, float value) {
    parts_.push_back(std::make_unique<Part>());
    parts_.back()->keys = std::move(keys);
    parts_.back()->floats.assign(parts_.back()->keys.size() * dim, value);
    return *parts_.back();
  }

  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_MANY_CALLS_H_
