# What somebody types who looks around in a project: 30 small commands, one after the other.
#
# S1: directory with project/ (on the mount)
cd "$S1/project"
ls
cat README
wc -l README
ls module-000
head -n 5 module-000/file-00000.c
tail -n 3 module-000/file-00001.c
grep -n value_2_7 module-000/file-00002.c
grep -c return module-000/*.c
wc -l module-000/*.c
cat module-000/file-00003.c | grep _12 | cut -d '(' -f 1
sort -r notes.txt | head -n 4
uniq -c notes.txt
diff module-000/file-00004.c module-000/file-00004.c
cmp module-000/file-00004.c module-000/file-00004.c
stat -c '%n %s' README
sed -n 2,4p README
awk '{ print $1 }' notes.txt | sort -u
cut -d ' ' -f 2 notes.txt | head -n 3
md5sum README
find . -name '*03.c'
mkdir results
grep -h return module-000/file-00005.c > results/returns
wc -c results/returns
cp README results/README
mv results/README results/first
ls results
sort notes.txt > results/sorted
tail -n 2 results/sorted
rm results/first
ls results
