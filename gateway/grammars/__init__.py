"""What clients may ask an output to match, checked and put into the form that an engine enforces in full.

Pure: knows no model, no engine and no HTTP.
"""
