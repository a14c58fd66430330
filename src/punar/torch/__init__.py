"""The PyTorch front end: records a step as a trace, and makes later steps obey a plan."""
