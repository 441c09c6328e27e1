# Git workflow (paper §7.1): apply saved patches one by one and commit each.
#
# S1: directory with repository/ and patches/*.patch (on the mount)
cd "$S1/repository" || exit
for patch in ../patches/*.patch; do
    git apply "$patch" || exit
    git status
    git add . || exit
    git commit -m "apply ${patch##*/}" || exit
done
git log --format='%H %s'
