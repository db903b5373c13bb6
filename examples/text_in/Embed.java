import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.extensions.OrtxPackage;
import java.util.Arrays;
import java.util.Map;

/** Prints the vectors of texts: {@code java Embed MODEL TEXT...}; MODEL is a file that reads texts. */
public final class Embed {
  public static void main(String[] arguments) throws Exception {
    String[] texts = Arrays.copyOfRange(arguments, 1, arguments.length);
    OrtEnvironment environment = OrtEnvironment.getEnvironment();
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      options.registerCustomOpLibrary(OrtxPackage.getLibraryPath());
      try (OrtSession session = environment.createSession(arguments[0], options);
          OnnxTensor input = OnnxTensor.createTensor(environment, texts, new long[] {texts.length});
          OrtSession.Result result =
              session.run(Map.of(session.getInputNames().iterator().next(), input))) {
        float[][] vectors = (float[][]) result.get(0).getValue();
        for (int row = 0; row < texts.length; row++) {
          System.out.println(texts[row] + ": " + Arrays.toString(vectors[row]));
        }
      }
    }
  }
}
