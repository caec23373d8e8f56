"""The LTX pipeline as jobs of the fleet: prompt, SP stage, TDP stage, decode."""
