"""The faithfulness probe: does a chain of thought carry its answer, or is it decoration?"""
