"""Names of measures, kinds of models and similarities; the help of the command needs nothing else of this package."""

DEFAULT_SPLIT = "test"
DEFAULT_MEASURES = ("nDCG@10", "MRR@10", "Recall@100", "MAP")
BM25 = "bm25"
DENSE, SPARSE, LATE_INTERACTION, RERANKER = "dense", "sparse", "late interaction", "reranker"
COSINE, DOT, EUCLIDEAN, MANHATTAN = SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
MAXSIM, MEANMAXSIM = "maxsim", "meanmaxsim"
