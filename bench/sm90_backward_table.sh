#!/bin/bash
# The table of the Hopper backward: JSON lines on stdout, the most important first; about a minute on one H200.
#
#   bench/sm90_backward_table.sh BENCH PATTERNS [sizes|lengths]...      both parts where none is named
#
# In:   BENCH: build/cuda/bin/sm90_backward_bench; PATTERNS: a folder with {local,typical,wide}.json of 131072 tokens and
#       {local,typical,wide}_{8192,32768,524288}.json, 16 heads (docs/formats.md).
# sizes: 131072 tokens, one rank and rank 0 of 8, both modes; head_dim 64; fp16; CSR; blocks alone; heads 32/8 and 64/8.
# lengths: 8192 to 524288 tokens, one rank and rank 0 of 8.
set -eu
bench=$1 patterns=$2
shift 2
for part in "${@:-sizes lengths}"; do
  for part in $part; do
    case $part in
      sizes)
        "$bench" "$patterns/typical.json" one+ rank8+ csr! no_columns "$patterns/local.json" one+ rank8+ csr! no_columns \
          "$patterns/wide.json" one!+ rank8+ no_columns "$patterns/typical.json" --head-dim 64 one+ rank8 --dtype fp16 one! \
          --head-dim 128 one+ rank8 --dtype bf16 --runs 5 --heads 32/8 one! rank8 --heads 64/8 one! rank8 \
          --head-dim 64 --heads 32/8 one! rank8 --runs 9 --heads 16/2 "$patterns/local.json" one! rank8 "$patterns/wide.json" one! rank8
        ;;
      lengths)
        for tokens in 8192 32768 524288; do
          for pattern in local typical wide; do
            "$bench" --runs $((tokens > 100000 ? 3 : 9)) "$patterns/${pattern}_$tokens.json" one! rank8
          done
        done
        ;;
      *)
        echo "sm90_backward_table.sh: expected sizes or lengths, got $part" >&2
        exit 2
        ;;
    esac
  done
done
