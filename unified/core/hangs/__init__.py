"""Diagnosis of workers that stand still: their stacks, the collectives that they wait in, and a verdict."""
