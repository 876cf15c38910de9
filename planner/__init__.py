"""`gradwire advise`: measure a model and a network, predict the step time with each hook, and recommend a hook."""
