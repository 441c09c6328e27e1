# By hand, where everything lies on one server: the script itself is run there.
#
# SSH: ssh with its options   H1: the server   WITH: the script's variables, for a remote shell
$SSH "$H1" "$WITH bash -s" < "$SCRIPT"
