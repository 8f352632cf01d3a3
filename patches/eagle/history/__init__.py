"""Draft from text that was generated before: no drafter model is needed.

Sources are a request's own prompt and answer, the other answers to its prompt (of its group, of earlier epochs), and
recent answers to any prompt. Ideas from prompt lookup, SuffixDecoding, DAS, Seer and RhymeRL."""
