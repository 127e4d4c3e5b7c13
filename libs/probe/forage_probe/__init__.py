"""The faithfulness probe: measures how much an answer depends on the chain of thought before it."""
