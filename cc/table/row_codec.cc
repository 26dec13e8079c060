#include "cc/table/row_codec.h"

#include <algorithm>

#include "cc/optimizer/optimizer.h"

namespace tfswitch {

RowCodec::RowCodec(const TableConfig& config) {
  Add(config.storage_dtype.embeddings, config.dim);
  embedding_words_ = num_words_;
  for (const SlotRun& run : SlotRuns(config.optimizer, config.dim)) {
    Add(run.is_per_coordinate ? config.storage_dtype.slots
                              : FloatType::kFloat32,
        run.count);
  }
  parts_ = storage_.data();
  num_parts_ = static_cast<int>(storage_.size());
  has_plain_embedding_ = parts_[0].type == FloatType::kFloat32;
  has_plain_slots_ = std::all_of(
      storage_.begin() + 1, storage_.end(),
      [](const Part& part) { return part.type == FloatType::kFloat32; });
  first_packed_part_ = has_plain_embedding_ ? 1 : 0;
  num_packed_parts_ = (has_plain_slots_ ? 1 : num_parts_) - first_packed_part_;
}

void RowCodec::Add(FloatType type, int count) {
  if (count == 0) return;
  const bool is_half = type != FloatType::kFloat32;
  // Adjacent slots of the same type become one part. The embedding, the first
  // part, stays separate.
  Part* const last = storage_.size() > 1 ? &storage_.back() : nullptr;
  if (last != nullptr && last->type == type &&
      (!is_half || last->count % 2 == 0)) {
    last->count += count;
  } else {
    storage_.push_back({type, num_floats_, count, num_words_});
  }
  num_floats_ += count;
  num_words_ += is_half ? (count + 1) / 2 : count;
}

}  // namespace tfswitch
