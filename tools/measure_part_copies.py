"""Host time of copying a gathered tensor part by part, as torch.distributed.all_gather into a list does.

    python tools/measure_part_copies.py $OUT/part_copies.csv

ProcessGroupNCCL::allgather gathers into one flat tensor, then copies each rank's part to its place in the
list: as many copies as ranks. The same loop from C++, compiled here, and from Python.
"""

import csv
import sys
import time

import torch

SOURCE = """
#include <torch/extension.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
void copied(std::vector<torch::Tensor> to, std::vector<torch::Tensor> from) {
  auto stream = c10::cuda::getCurrentCUDAStream();
  for (size_t j = 0; j < to.size(); ++j) {
    c10::cuda::CUDACachingAllocator::recordStream(to[j].storage().data_ptr(), stream);
    to[j].copy_(from[j], true);
  }
}
"""
RANKS = (128, 768, 1536)
ELEMENTS = (1024, 98304)  # of a part: a small one, and a rank's of a large matrix of GPT-3


def looped(to: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
    for target, part in zip(to, parts, strict=True):
        target.copy_(part, non_blocking=True)


def compiled():
    try:
        from torch.utils.cpp_extension import load_inline

        module = load_inline("parts", SOURCE, functions=["copied"], with_cuda=False, verbose=False)
        return "C++", module.copied
    except Exception as error:
        print("no compiler:", str(error).splitlines()[0][:120], flush=True)
        return "Python", looped


def main(path: str) -> None:
    rows = []
    for how, copied in dict([("Python", looped), compiled()]).items():
        for ranks in RANKS:
            for elements in ELEMENTS:
                flat = torch.zeros(ranks, elements, device="cuda", dtype=torch.float16)
                parts, to = list(flat), list(torch.empty_like(flat))
                for _ in range(3):
                    copied(to, parts)
                torch.cuda.synchronize()
                issued, done, times = 0.0, 0.0, 10
                for _ in range(times):
                    start = time.perf_counter()
                    copied(to, parts)
                    issued += time.perf_counter() - start
                    torch.cuda.synchronize()
                    done += time.perf_counter() - start
                rows.append(
                    {
                        "how": how,
                        "ranks": ranks,
                        "elements": elements,
                        "issued_us": round(issued / times / ranks * 1e6, 3),
                        "done_us": round(done / times / ranks * 1e6, 3),
                    }
                )
                print(rows[-1], flush=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1])
