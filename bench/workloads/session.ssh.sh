# By hand: a call of ssh for each command.
while IFS= read -r line; do
    case $line in
        '#'* | 'cd '*) ;;
        *) $SSH -n "$H1" "cd '$S1/project' && { $line; }" ;;
    esac
done < "$SCRIPT"
