"""Why is the compressed version of a language model slower? Measured causes, crossovers, quality, published claims.

Data flows one way, and imports point down only: facts < compress < measure < studies < runs < share < cli; predict
imports facts alone.
"""

import warnings

# tqdm, which transformers imports, asks for widgets in every kernel without them; no bar here uses any
warnings.filterwarnings("ignore", message="IProgress not found")
