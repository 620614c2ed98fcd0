"""Why is the compressed version of a language model slower? Measured causes, crossovers, quality, published claims.

Data flows one way, and imports point down only: facts < compress < measure < studies < runs < share < cli; predict
imports facts alone.
"""
