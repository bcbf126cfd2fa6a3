#!/bin/bash
# The table of the Hopper backward: JSON lines on stdout, the most important first; half a minute a part on one H200.
#
#   bench/sm90_backward_table.sh BENCH PATTERNS [sizes|lengths|heads]...      all parts where none is named
#
# In:   BENCH: build/cuda/bin/sm90_backward_bench; PATTERNS: a folder with {local,typical,wide}.json of 131072 tokens and
#       {local,typical,wide}_{8192,32768,524288}.json, 16 heads (docs/formats.md).
# sizes: 131072 tokens, one rank and rank 0 of 8, both modes in turn; head_dim 64; fp16; CSR; blocks alone.
# lengths: 8192 to 524288 tokens, one rank and rank 0 of 8.
# heads: 32/8 and 64/8, head_dim 64 and 128, 8192 to 524288 tokens.
set -eu
bench=$1 patterns=$2
shift 2
for part in "${@:-sizes lengths heads}"; do
  for part in $part; do
    case $part in
      sizes)
        "$bench" "$patterns/typical.json" one+ rank8!+ csr! no_columns! "$patterns/local.json" one+ rank8!+ csr! no_columns! \
          "$patterns/wide.json" one!+ rank8!+ no_columns! "$patterns/typical.json" --head-dim 64 one+ rank8!+ --dtype fp16 one! rank8! \
          --head-dim 128 one! rank8! --dtype bf16 --head-dim 64 "$patterns/local.json" one! rank8! "$patterns/wide.json" one! rank8!
        ;;
      lengths)
        for tokens in 8192 32768 524288; do
          for pattern in typical local wide; do
            "$bench" --runs $((tokens > 100000 ? 3 : 9)) "$patterns/${pattern}_$tokens.json" one! rank8!
          done
        done
        ;;
      heads)
        "$bench" --runs 5 --heads 32/8 "$patterns/typical.json" one!+ rank8!+ --heads 64/8 one!+ rank8!+ --head-dim 64 one! rank8! \
          --heads 32/8 one! rank8! --head-dim 128 "$patterns/local.json" one! rank8! "$patterns/wide.json" one! rank8! \
          --heads 64/8 one! rank8! "$patterns/local.json" one! rank8!
        for tokens in 8192 32768 524288; do
          "$bench" --runs $((tokens > 100000 ? 3 : 5)) --heads 32/8 "$patterns/typical_$tokens.json" one! rank8! --head-dim 64 \
            one! rank8! --heads 64/8 one! rank8! --head-dim 128 one! rank8!
        done
        ;;
      *)
        echo "sm90_backward_table.sh: expected sizes, lengths or heads, got $part" >&2
        exit 2
        ;;
    esac
  done
done
