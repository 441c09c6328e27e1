# One small command.
#
# S1: directory with small (on the mount)
cat "$S1/small"
