# A search through a source tree of small files.
#
# S1: directory with tree/ (on the mount)
grep -r 'value_[0-9]*7_17(' "$S1/tree"
