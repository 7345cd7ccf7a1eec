//! Words for a shell.

/// The script of a command line, as in `ssh`: one word is a script itself; several are a program and its
/// arguments, each taken literally.
#[must_use]
pub fn script_of(words: &[String]) -> String {
    match words {
        [script] => script.clone(),
        words => words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "),
    }
}

/// A word that a shell reads as exactly this text.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[test]
    fn one_word_is_a_script() {
        assert_eq!(script_of(&words(&["false; exit 3"])), "false; exit 3");
    }

    #[test]
    fn a_shell_reads_several_words_as_they_were() {
        let odd = words(&[
            "printf", "%s\\n", "it's", "", "a  b", "$HOME", "*", "x=\"1\"", "a\nb", "~", "é",
        ]);
        let output =
            std::process::Command::new("bash").args(["-c", &script_of(&odd)]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said, odd[2..].iter().map(|word| format!("{word}\n")).collect::<String>());
    }
}
