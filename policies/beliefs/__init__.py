"""What a router may believe of backends, classes and the whole fleet; each noun a file, with its O(1) updates.

A learner (`policies.learners.ccr`) owns these and changes them as requests go by. Decisions read them on the views and
change nothing. No noun here reads a clock: time comes with each call.
"""
